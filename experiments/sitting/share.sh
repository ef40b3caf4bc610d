# Start CUDA's Multi-Process Service (begin.sh) and try it with two processes at once: a policy of 135M leaves most of a card idle, and without it
# kernels of several processes take turns.  It is a process of ours and changes no setting of the card.  /tmp/shared is there where it works.
. experiments/sitting/environment.sh
mkdir -p $CUDA_MPS_PIPE_DIRECTORY
setsid -w nvidia-cuda-mps-control -d < /dev/null || { echo "no Multi-Process Service here: kernels of several processes take turns"; exit; }
try() { timeout -k 2 60 python3 -c 'import torch; x = torch.rand(4096, 4096, device="cuda"); assert (x @ x).isfinite().all()'; }
try & first=$!
try && wait $first && touch /tmp/shared && echo "kernels of several processes run at once: servers $(echo get_server_list | nvidia-cuda-mps-control)" && exit
echo "the Multi-Process Service failed: kernels of several processes take turns"; tail -n 5 $CUDA_MPS_LOG_DIRECTORY/*.log
echo quit -t 5 | timeout 20 nvidia-cuda-mps-control; pkill -9 -f nvidia-cuda-mps
