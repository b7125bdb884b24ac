# Everything works on a fresh machine with Python 3.10+ and git. The torch build is pinned here and nowhere else:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126"     (GTX 10xx, P40, P100, V100)
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The build of torch that went in first is the only one that may be there: without this, pip answers a requirement that
# does not fit it with another torch.
INSTALL = $(BIN)/pip install -q -c $(VENV)/torch.txt

.DELETE_ON_ERROR:
.PHONY: setup demo test check bench gpu docs nvdisasm clean

setup: $(VENV)/.test

demo: $(VENV)/.demo
	$(BIN)/pascal-attn demo

# Bytecode is kept even where the environment says otherwise: hundreds of processes import the same modules.
test: $(VENV)/.test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# The nodes are typed as ComfyUI loads them: the whole folder as one package, under a name of its own.
check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	mkdir -p .mypy_cache/pack && ln -sfn ../.. .mypy_cache/pack/pascal_attention_pack
	MYPYPATH=.mypy_cache/pack $(BIN)/mypy -p pascal_attention_pack.nodes

bench: $(VENV)/.test
	$(INSTALL) -e ".[bench]"
	$(BIN)/python -m tools.peers

# The docs site with the API reference, in site/. A warning, such as a broken link, is an error.
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# All that is worth running on a card, in nine minutes at most; GPU="--parts tests --seconds 3000" for other things. The
# test extra has the peers, so nothing is installed beside it.
gpu: $(VENV)/.test
	$(BIN)/python -m tools.gpu $(GPU)

nvdisasm: $(BIN)/nvdisasm

# The tests that execute NVIDIA's machine code read it with this. It comes with a wheel of 188 MB that torch must not
# find: nothing else of it is kept.
$(BIN)/nvdisasm: $(VENV)/torch.txt pyproject.toml
	$(BIN)/pip install -q --no-deps --target $(VENV)/triton $(shell sed -n 's/^nvdisasm = \["\([^;]*\);.*$$/\1/p' pyproject.toml)
	cp $(VENV)/triton/triton/backends/nvidia/bin/nvdisasm $@
	rm -r $(VENV)/triton

# torch goes in first and alone, so that nothing else can choose another build of it.
$(VENV)/torch.txt:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip list --format=freeze | grep "^torch==" > $@

$(VENV)/.demo: $(VENV)/torch.txt pyproject.toml
	$(INSTALL) -e ".[demo]"
	touch $@

# Without the NVRTC of the tables where torch has brought its own.
$(VENV)/.test: $(VENV)/torch.txt pyproject.toml
	$(INSTALL) -e ".[test,static]" || $(INSTALL) -e ".[test]"
	touch $@

$(VENV)/.check: $(VENV)/torch.txt pyproject.toml
	$(INSTALL) -e ".[check]"
	touch $@

# The reference is read from the source; torch is not needed.
$(VENV)/.docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ',')
	touch $@

clean:
	rm -rf $(VENV) site demo_out bench_out build dist *.egg-info
