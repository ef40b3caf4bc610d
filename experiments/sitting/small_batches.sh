# The first commands of a queue (begin.sh) on one card, 500 s: decode steps of few sequences beside vLLM, which whole_steps.sh's three calls have
# brought, and ragged rollouts with and without guesses.  Runs of the proof may follow: `bash experiments/sitting/small_batches.sh; bash .. runs.sh ..`.
. experiments/sitting/environment.sh
cd $TREE || exit 1; export CUDA_MPS_PIPE_DIRECTORY=/tmp/none; out=/tmp/small/rows; mkdir -p $out
install_vllm & installing=$!; run prewarm benchmarks.prewarm; wait $installing
LIMIT=260 run steps benchmarks.rollout steps --precisions fp8,int8,int8-head,bf16 --counts 1,8,32,64,128 --out $out/steps
LIMIT=300 with_vllm run steps-vllm benchmarks.rollout steps-vllm --mode bf16 --counts 1,8,32,64,128 --out $out/steps
LIMIT=200 run ragged-alone benchmarks.rollout native --precision int8 --cases ragged --speculation 0 --out $out/native
LIMIT=200 run ragged benchmarks.rollout native --precision int8 --cases ragged --out $out/native
tail -n +1 $out/steps/* $out/native/*
