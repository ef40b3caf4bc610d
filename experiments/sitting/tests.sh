# Beside a sitting's start (README.md): GPU tests, begun behind unpack.sh; /tmp/tests.log, which wait.sh keeps, says how they ended.
. experiments/sitting/environment.sh
cd $TREE || exit 1
timeout -s INT -k 20 ${LIMIT:-280} $ALONE python3 -m pytest -v -n ${WORKERS:-3} -p no:cacheprovider --timeout 240 "$@" >> /tmp/tests.log 2>&1
echo "exit status $?" >> /tmp/tests.log
