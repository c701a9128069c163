echo 5 > /proc/self/autogroup
cd /work/teach; export OMP_NUM_THREADS=1; C=/work/clean/out; mkdir -p out/t
student() { s=$1; D=$C/demo; [ $s = 0 ] || D=$C/demo$s
  [ -e out/t/weak$s/last ] || .venv/bin/python sft.py --preset toy --ckpt $D/toy/init --data $D/toy/pretrain.jsonl --val $D/toy/sft_val.jsonl --batch-size 12 --steps 350 --eval-every 0 --seed $s --out out/t/weak$s > out/t/weak$s.txt 2>&1
  ev $s weak$s out/t/weak$s; }
ev() { s=$1; D=$C/demo; [ $s = 0 ] || D=$C/demo$s
  [ -e out/t/eval-$2/summary.json ] || .venv/bin/python eval.py --preset toy --data $D/toy/eval.jsonl --frames 4 16 64 --tools on --temperature 1 --ckpt $3 --out out/t/eval-$2 > out/t/eval-$2.txt 2>&1; }
arm() { s=$1; name=$2-$1; D=$C/demo; [ $s = 0 ] || D=$C/demo$s; shift; shift
  [ -e out/t/eval-$name/summary.json ] && return
  .venv/bin/torchrun --standalone --nproc_per_node 2 grpo.py --preset toy --ckpt out/t/weak$s --data $D/toy/rl.jsonl --steps 24 --seed $s --out out/t/$name --save-every 0 "$@" > out/t/$name.txt 2>&1
  ev $s $name out/t/$name; rm -rf out/t/$name/step_*/train_state; }
for s in 0 1 2; do
  D=$C/demo; [ $s = 0 ] || D=$C/demo$s
  student $s
  arm $s para
  arm $s distill --teacher $D/grpo --set rewards=off --train-sub
  arm $s both --teacher $D/grpo --train-sub
  [ $s = 0 ] && arm $s distillmain --teacher $D/grpo --set rewards=off
  [ $s = 0 ] && arm $s sub --train-sub
done
