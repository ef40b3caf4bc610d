# A size of the ladder in half an hour of one card: its start, guesses with it where GUESSES=1, then two of its runs at once, or one.  SIZE ARM:SEED ..
#   .carry/base     bash experiments/sitting/unpack.sh; setsid bash experiments/sitting/one_size.sh 1.1b int8-backward:0 int8-backward:1 > /tmp/queue.log 2>&1 < /dev/null &
#                   sleep 5; tail /tmp/queue.log
#   then, sent with it, `bash experiments/sitting/wait.sh 575`, three times
# A start is evaluated once, after the updates that the table of experiments/proof/README.md has; evaluated every 20 updates, as when it was first
# made, that of 1.1b took 557 s, of which nine evaluations took some 190.  One run of 1.1b alone took 780 s, two beside each other 870 to 1,190 s
# (130 of 150 steps in 1,025 s once): two begin where 1,200 s are left, else the first.
. experiments/sitting/environment.sh
cd $TREE || exit 1; size=$1; shift; out=/tmp/one_size/rows; mkdir -p $out
case $size in 27m | 443m) updates=420 ;; 108m) updates=440 ;; 1.1b) updates=460 ;; *) updates=20 ;; esac
bash experiments/sitting/share.sh < /dev/null
$ALONE python3 -m benchmarks.prewarm > $out/prewarm.log 2>&1 & warm=$!
$ALONE python3 -m experiments.proof ladder $PROOF --size $size -- --rollout.kv_memory_gib 16 --checkpoint.every 0 --evaluation.every $updates > $out/start.log 2>&1; since "$size: $?"
wait $warm; cp $PROOF/start-$size/start.json $out/; cat $out/start.json
for task in multiply gsm; do
  [ "${GUESSES:-0}" = 0 ] || CUDA_MPS_PIPE_DIRECTORY=/tmp/none LIMIT=120 run guesses-$size-$task benchmarks.speculation --precision int8 --repeats 6 --folder $PROOF/start-$size/model --prompts $PROOF/data/$task.train.jsonl
done
[ $(( $(date +%s) - $(cat $BEGUN) )) -lt 510 ] || set -- "$1"
python3 experiments/sitting/ladder.py --runs $(printf "ladder-$size:%s " "$@") --until 1700 --needs 780
touch /tmp/queue.ended
