#!/usr/bin/env bash
# The tests that need a GPU, then the rates of one: under six minutes. Without a GPU the tests are skipped and the
# rates are those of a small model on the CPU, so that the script itself can be tried anywhere.
#
#   benchmarks/gpu_check.sh [FOLDER]    figures go to FOLDER/gpu.json; default: a temporary folder
#
# PYTHON names an interpreter that has torch and transformers; without one, `make install` makes .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

python=${PYTHON:-python3}
if ! "$python" -c "import torch, safetensors, transformers, omegaconf, ruamel.yaml, tqdm, pytest, hypothesis" 2>/dev/null; then
    make install
    python=.venv/bin/python
fi
"$python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__,
    "GPUs", torch.cuda.device_count())'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${1:-$work}
mkdir -p "$out"
"$python" -m pytest -q -o addopts= -p no:cacheprovider -m gpu tests/test_gpu.py tests/test_reader_faults.py
"$python" -m benchmarks.gpu --work "$work/blocks" | tee "$out/gpu.json"
