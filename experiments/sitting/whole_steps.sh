# Half an hour of one card: whole steps of 8B in the default flow beside vLLM and transformers, then ragged rollouts and guesses of small models.
# Not yet tried.  .carry/vllm-a and .carry/vllm-b are vLLM 0.25.1 and what it imports, as wheels (a/whl) and archives of its Python and its library
# (a/vllm_py.tar.xz, b/vllm_C.tar.xz).  Four calls, sent at once:
#   .carry/base     bash experiments/sitting/unpack.sh; setsid bash experiments/sitting/whole_steps.sh > /tmp/queue.log 2>&1 < /dev/null &
#                   bash experiments/sitting/wait.sh 400
#   .carry/vllm-a   mkdir -p /tmp/vllm; cp -r .carry/vllm-a /tmp/vllm/a; bash experiments/sitting/wait.sh 5
#   .carry/vllm-b   cp -r .carry/vllm-b /tmp/vllm/b; touch /tmp/vllm/whole; bash experiments/sitting/wait.sh 560
#   .carry/base     bash experiments/sitting/wait.sh 585
. experiments/sitting/environment.sh
cd $TREE || exit 1; export CUDA_MPS_PIPE_DIRECTORY=/tmp/none; out=/tmp/whole/rows; mkdir -p $out
run() { name=$1; shift; timeout ${LIMIT:-300} python3 -m "$@" > $out/$name.jsonl 2> $out/$name.log; status=$?; since "$name: $status"; return $status; }
steps() { run native-$1-$3 benchmarks.end_to_end native --precision int8 --cases $1 --recompute $2 --tokens $3 --out $out/steps; }
run prewarm benchmarks.prewarm
steps 2k none 6912 || steps 2k none 4608
steps 8k mlp 16896 || steps 8k mlp 8448
until [ -e /tmp/vllm/whole ]; do sleep 1; done
python3 -m pip install -q --no-index --no-deps --target /tmp/vllm/site /tmp/vllm/a/whl/*.whl
tar xJf /tmp/vllm/a/vllm_py.tar.xz -C /tmp/vllm/site; tar xJf /tmp/vllm/b/vllm_C.tar.xz -C /tmp/vllm/site/vllm; since "vLLM"
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip
PYTHONPATH=$PYTHONPATH:/tmp/vllm/site LIMIT=420 run vllm benchmarks.end_to_end rollout-vllm --out $out/steps
LIMIT=420 run transformers benchmarks.end_to_end train-transformers --sequences 32 --out $out/steps
python3 -m benchmarks.end_to_end table $out/steps
run ragged benchmarks.rollout native --precision int8 --cases ragged --out $out/native   # with guesses, as is the default
for size in 27m 108m; do
  python3 -m experiments.proof ladder $PROOF --size $size -- --rollout.kv_memory_gib 16 --checkpoint.every 0 > $out/start-$size.log 2>&1; since "$size: $?"
  run guesses-$size benchmarks.speculation --precision int8 --repeats 6 --folder $PROOF/start-$size/model --prompts $PROOF/data/multiply.train.jsonl
done
touch /tmp/queue.ended
