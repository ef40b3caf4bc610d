# Sourced by the other scripts: where everything lies on the borrowed machine.
export TREE=/tmp/tree PROOF=/tmp/proof CARRIED=/tmp/carried BEGUN=/tmp/begun
export PYTHONPATH=/tmp/site:$TREE/src:$TREE DG_JIT_CACHE_DIR=/tmp/caches/deep_gemm TRITON_CACHE_DIR=/tmp/caches/triton
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# Kernels of several processes run at once where CUDA's Multi-Process Service answers here (share.sh); else, and with ALONE, they take turns.
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps PATH=$PATH:/usr/local/nvidia/bin
ALONE="env CUDA_MPS_PIPE_DIRECTORY=/tmp/none"
since() { echo "$1: $(( $(date +%s) - $(cat $BEGUN) )) s after the beginning"; }
