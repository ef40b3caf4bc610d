# Sourced by the other scripts: where everything lies on the borrowed machine.
export TREE=/tmp/tree PROOF=/tmp/proof CARRIED=/tmp/carried BEGUN=/tmp/begun
export PYTHONPATH=/tmp/site:$TREE/src:$TREE DG_JIT_CACHE_DIR=/tmp/caches/deep_gemm TRITON_CACHE_DIR=/tmp/caches/triton
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# Kernels of several processes run at once where CUDA's Multi-Process Service answers here (share.sh); else, and with ALONE, they take turns.
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps PATH=$PATH:/usr/local/nvidia/bin
ALONE="env CUDA_MPS_PIPE_DIRECTORY=/tmp/none"
since() { echo "$1: $(( $(date +%s) - $(cat $BEGUN) )) s after the beginning"; }
# A command's rows and log, as $out/NAME.jsonl and .log, within LIMIT seconds.
run() { name=$1; shift; timeout ${LIMIT:-300} python3 -m "$@" > $out/$name.jsonl 2> $out/$name.log; status=$?; since "$name: $status"; return $status; }
# vLLM from the three parts that calls have left in /tmp/vllm (whole_steps.sh), for `with_vllm run ..`.
install_vllm() {
  [ -e /tmp/vllm/whole ] && python3 -m pip install -q --no-index --no-deps --target /tmp/vllm/site /tmp/vllm/whl/*.whl && \
    tar xJf /tmp/vllm/vllm_py.tar.xz -C /tmp/vllm/site && cat /tmp/vllm/vllm_C.tar.xz.* | tar xJf - -C /tmp/vllm/site/vllm; since "vLLM: $?"
}
with_vllm() { [ -e /tmp/vllm/site/vllm ] && VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip PYTHONPATH=$PYTHONPATH:/tmp/vllm/site "$@"; }
