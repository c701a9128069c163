#!/bin/bash
# One GPU day: bash run.sh A | B. Each part has its limit and writes $OUT/PART.json after each number; a part that
# fails or is ended costs nothing to the next. Before: see README.md (environment, small/, clip720.mp4 (7 MB)).
cd "$(dirname "$0")" || exit 1
export OUT=${OUT:-gpu_day_out} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export VLLM_LOGGING_LEVEL=INFO TRITON_CACHE_AUTOTUNING=1
[ -d "$SITE" ] && export PYTHONPATH=$SITE  # the environment of pack.py, else the machine's own packages
PYTHON=${PYTHON:-python3} DRY=${DRY:-}
mkdir -p "$OUT"

join() {  # files that pack.py cut, once
    find "$SITE" -name '*.000.cut' 2>/dev/null | while read -r first; do
        cat "${first%.000.cut}".*.cut >"${first%.000.cut}" && rm "${first%.000.cut}".*.cut; done
}
part() {  # part SECONDS NAME COMMAND..
    local limit=$1 name=$2; shift 2
    local began=$SECONDS
    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "== $name: rc $?, $((SECONDS - began)) s"
    grep -E "^\[ *[0-9.]+ s\]" "$OUT/$name.log" | cut -c1-400
    [ -f "$OUT/$name.json" ] || tail -n 12 "$OUT/$name.log"
}

join
case $1 in
A)  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; df -h /dev/shm /tmp | tail -2; nproc
    part 200 update "$PYTHON" update.py $DRY --limit 195 --peers "${PEERS:-../peers}"
    part 60 update-warm "$PYTHON" update.py $DRY --limit 58 --rounds 1 --out "$OUT/warm" --skip trl plain profile variants
    part 110 attention "$PYTHON" attention.py $DRY --limit 105;;
B)  part 270 rollouts "$PYTHON" rollouts.py $DRY --limit 265
    part 60 decode "$PYTHON" decode.py $DRY --limit 58
    part 110 rollouts-graphs "$PYTHON" rollouts.py $DRY --limit 105 --engine graphs --rounds 1 --skip generate lockstep one;;
esac
