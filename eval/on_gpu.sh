#!/bin/bash
# Checks on a GPU, in parts.
#   bash eval/on_gpu.sh OUT [table] [sampled] [rows] [head]                   # a real model, see docs/results/gpu.md
#   bash eval/on_gpu.sh OUT [tests] [identity] [forwards] [long] [chain] [stock] [pair] [model] [train]
#   bash eval/on_gpu.sh OUT                                                   # all parts
#   DEVICE=cpu bash eval/on_gpu.sh OUT                                        # the same commands on a small scale
# Each command may take LIMIT seconds (540). The end lists commands that failed or timed out; the others still run. A
# comparison of `table`, `sampled` and `rows` asks for MINUTES (3), the one of transformers' slower forms for SLOW_MINUTES
# (1.5); it writes what it has, and continues if it runs again.
# TARGET, DRAFT: a pair; if omitted, the small pair of the tests. DRAFTER: a causal LM with the target's tokens.
# QUESTIONS: MT-Bench's file. HUMANEVAL: its file. CONVERSATIONS: what the target answers for `head`; if omitted, it
# writes the questions, too. TRAIN_FROM: a head to continue from. PYTHON: the interpreter. BACK: a folder for all results
# so far, after each command and in `head` each minute, in parts of 15 MiB: `cat results.tar.gz.* | tar xz`. Paths other
# than OUT are relative to the root of the checkout.
set -uo pipefail
: "${1:?a folder for the results}"
OUT=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2; shift
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}; LIMIT=${LIMIT:-540}; DEVICE=${DEVICE:-cuda}
SMALL=tests/pairs
TARGET=${TARGET:-$SMALL/small-target}; DRAFT=${DRAFT:-$SMALL/small-draft}; DRAFTER=${DRAFTER:-$TARGET}
PAIR=(--target "$TARGET" --draft "$DRAFT" --device "$DEVICE")
export PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
if [ -z "${QUESTIONS:-}" ]; then
    QUESTIONS=$OUT/questions.jsonl
    for word in red blue green; do
        echo "{\"question_id\": \"$word\", \"category\": \"writing\", \"turns\": [\"Say $word.\", \"Again.\"]}"
    done >"$QUESTIONS"
fi
HUMANEVAL=${HUMANEVAL:-$QUESTIONS}; MINUTES=${MINUTES:-3}; SLOW_MINUTES=${SLOW_MINUTES:-1.5}
PROMPTS=16 EACH=3 TOKENS=128
COMPARED=(--dtype bfloat16 --reread --then "Now add type hints and a docstring, and return the whole program.")
ALONE=20 TOGETHER=8 LONGEST=256 TREE=60,6,10 ROWS_TREE=16,5,4 CHAIN_TREE=6,5,1
CYCLES=(--dtype bfloat16 --captured --rows 1 8 --context 256 --rounds 10)
SHAPE=(--shape llama-3.1-8b --nodes 1 60 8 16 128 --rows 1 8 --tree 60,6,10 --context 256 --rounds 10
       --captured --draft-vocabularies 0 32000)
LONG=(--shape llama-3.1-8b --nodes 1 60 --rows 1 8 --tree 60,6,10 --context 4000 --rounds 10 --settings exact
      --captured --draft-vocabularies 32000)
CHAIN=(--shape llama-3.1-8b --draft-shape qwen2.5-0.5b --settings exact --context 256 --rounds 10 --captured)
ASKED=(--self-prompted 200 --batch 200 --max-length 1024 --max-new-tokens 128)
STEPS=(--steps 200 --batch-tokens 16384 --eval-every 100)
ANSWERS=(--batch 512 --max-new-tokens 512 --max-length 1280)
HASS=(--steps 2600 --batch-tokens 16384 --gradient-accumulation 2 --intermediate-size 2560 --draft-vocab-size 8192
      --eval-every 400 --eval-documents 64)
if [ "$DEVICE" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=
    PROMPTS=2 EACH=1 TOKENS=8
    SHAPE=(--shape tiny --nodes 1 8 --tree 8,4,2 --context 16 --rounds 2 --captured --draft-vocabularies 0 64)
    LONG=(--shape tiny --nodes 1 8 --tree 8,4,2 --context 64 --rounds 2 --settings exact --captured)
    CHAIN=(--shape tiny --draft-shape tiny --settings exact --context 16 --rounds 2 --captured)
    for word in {one,two,three,four,five,six}" "{eggs,cats,days,trees}; do
        echo "{\"messages\": [{\"role\": \"user\", \"content\": \"Count on from $word, please.\"}," \
             "{\"role\": \"assistant\", \"content\": \"$word, and so on, until there are ten.\"}]}"
    done >"$OUT/conversations.jsonl"
    ASKED=(--data "$OUT/conversations.jsonl" --max-length 256)
    STEPS=(--steps 2 --batch-tokens 512 --eval-documents 2 --eval-every 2)
    ALONE=2 TOGETHER=2 LONGEST=16 TREE=8,4,2 ROWS_TREE=4,2,2
    CYCLES=(--captured --rows 1 2 --context 16 --rounds 2)
    CONVERSATIONS=${CONVERSATIONS:-$OUT/conversations.jsonl} ANSWERS=(--batch 8 --max-new-tokens 16)
    HASS=(--steps 4 --batch-tokens 512 --gradient-accumulation 2 --draft-vocab-size 64 --eval-every 2
          --eval-documents 2)
fi
if [ "${CONVERSATIONS:-}" ]; then
    ANSWERS+=(--data "$CONVERSATIONS" --regenerate greedy)
else
    ANSWERS+=(--self-prompted 6000)
fi
failed=()

take() {  # NAME COMMAND...: write its output to OUT/NAME.log and stdout
    echo "== $1: ${*:2}"
    timeout -k 10 "$LIMIT" "${@:2}" 2>&1 | tee "$OUT/$1.log" || failed+=("$1")
    pack
}

pack() {  # all results to BACK, and of a trained head's folder the finished head, else the best so far
    [ "${BACK:-}" ] || return 0
    local without=(--exclude=own --exclude=features --exclude=states) packed
    [ -d "$OUT/head/head" ] && without+=(--exclude=best)
    packed=$(mktemp -d) && mkdir -p "$BACK"
    tar cz -C "$OUT" "${without[@]}" . | split -d -b 15M - "$packed/results.tar.gz."
    rm -f "$BACK"/results.tar.gz.* && mv "$packed"/* "$BACK" && rmdir "$packed"
}

compare() {  # NAME OPTIONS...: methods on HumanEval and an edit of each answer; if it fails, without what is compiled
    local command=("$PYTHON" -m eval.benchmark --target "$TARGET" --device "$DEVICE" --questions "$HUMANEVAL"
                   --max-new-tokens $LONGEST "${COMPARED[@]}" "${@:2}") before=${#failed[@]}
    take "$1" "${command[@]}" --static --out "$OUT/$1"
    [ ${#failed[@]} = $before ] || take "$1-uncompiled" "${command[@]}" --out "$OUT/$1-uncompiled"
}

with_head() {  # NAME OPTIONS...: without what is slow, which `with_drafter` has
    compare "$1" --draft "$DRAFT" --tree $TREE --without-head --settings "fsd 0.2" "fsd 0.3" --warm-up 1 \
        --limit $ALONE --minutes "$MINUTES" --leave-out model.generate "prompt lookup" "${@:2}"
}

with_drafter() {  # NAME OPTIONS...: chains of a small model, assisted generation, and transformers' other ways
    compare "$1" --draft "$DRAFTER" --tree $CHAIN_TREE --assisted 1 --settings "fsd 0.3" --warm-up 1 --limit $ALONE \
        --minutes "$SLOW_MINUTES" "${@:2}"
}

part_table() {  # greedy, one row; and the milliseconds of a cycle by its parts
    with_head table
    take table-cycle "$PYTHON" -m eval.forwards "${PAIR[@]}" "${CYCLES[@]}" --nodes 1 ${TREE%%,*} --tree $TREE \
        --out "$OUT/table-cycle"
    with_drafter table-drafter
    take table-drafter-cycle "$PYTHON" -m eval.forwards --target "$TARGET" --draft "$DRAFTER" --device "$DEVICE" \
        "${CYCLES[@]}" --nodes 1 ${CHAIN_TREE%%,*} --tree $CHAIN_TREE --settings exact --out "$OUT/table-drafter-cycle"
}

part_sampled() { with_head sampled --temperature 0.7; with_drafter sampled-drafter --temperature 0.7; }

part_rows() {  # two batches, both answered before they are timed: a graph is captured for each number of rows
    local temperature
    for temperature in 0 0.7; do
        compare "rows-$temperature" --draft "$DRAFT" --tree $ROWS_TREE --without-head --settings "fsd 0.2" "fsd 0.3" \
            --rows $TOGETHER --limit $((2 * TOGETHER)) --warm-up 2 --minutes "$MINUTES" --temperature $temperature
    done
}

part_head() {  # the target's own answers, their features, and a head by the objective hass
    take answers "$PYTHON" -m train.prepare_data --target "$TARGET" --dtype bfloat16 "${ANSWERS[@]}" --out "$OUT/own"
    take features "$PYTHON" -m train.features --target "$TARGET" --data "$OUT/own" --device "$DEVICE" \
        --out "$OUT/features"
    cat "$OUT"/features/*.safetensors &>/dev/null  # the first pass would wait for the disk
    while sleep 60 && kill -0 $$; do pack; done &>/dev/null & local packing=$!
    take head "$PYTHON" -m train.train_draft_head small --target "$TARGET" --data "$OUT/own" \
        --features "$OUT/features" --objective hass "${HASS[@]}" --tree $TREE --save-minutes 1 --keep 1 \
        --output "$OUT/head"
    kill $packing
}

part_tests() { take tests "$PYTHON" -m pytest -q -m cuda -p no:cacheprovider $(grep -l "mark\.cuda" tests/test_*.py); }

identity() {  # NAME DTYPE OPTIONS...: greedy texts against model.generate
    take "identity-$1" "$PYTHON" -m eval.lossless_check "${PAIR[@]}" --questions "$QUESTIONS" --dtype "$2" "${@:3}" \
        --limit $PROMPTS --samples 0 --max-new-tokens 64 --out "$OUT/identity-$1.json"
}

part_identity() { identity float32 float32; identity bfloat16 bfloat16; }  # captured cycles

part_stock() {  # other implementations of the target; `split` uses flash-attn
    local kind
    for kind in "float32 eager" "float32 sdpa" "float32 split" "bfloat16 sdpa" "bfloat16 split"; do
        set -- $kind
        identity "$1-$2" "$1" --attn-implementation "$2"
    done
}

part_forwards() {  # random weights of an 8B shape, compared with the time to read them once
    take forwards "$PYTHON" -m eval.forwards "${SHAPE[@]}" --device "$DEVICE" --out "$OUT/forwards"
}

part_long() {  # after a long text, where attention counts
    take forwards-long "$PYTHON" -m eval.forwards "${LONG[@]}" --device "$DEVICE" --out "$OUT/forwards-long"
}

part_chain() {  # a causal LM drafts chains; random weights
    local levels
    for levels in 5 15; do
        take "forwards-chain-$levels" "$PYTHON" -m eval.forwards "${CHAIN[@]}" --nodes 1 $((levels + 1)) \
            --tree "$((levels + 1)),$levels,1" --device "$DEVICE" --out "$OUT/forwards-chain-$levels"
    done
}

part_pair() {
    take forwards-pair "$PYTHON" -m eval.forwards "${PAIR[@]}" --nodes 1 8 16 --rounds 3 --context 64 \
        --out "$OUT/forwards-pair"
}

part_model() {
    take model "$PYTHON" -m eval.benchmark "${PAIR[@]}" --questions "$QUESTIONS" --warm-up 1 --per-category $EACH \
        --max-new-tokens $TOKENS --settings "fsd 0.3" "fsd 0.5" --out "$OUT/model"
}

part_train() {  # the target's own answers, then an EAGLE-2 and an EAGLE-3 head; accelerate picks the device
    local kind more
    take prepare "$PYTHON" -m train.prepare_data --target "$TARGET" "${ASKED[@]}" --out "$OUT/own"
    for kind in eagle2 eagle3; do
        more=(--head $kind)
        [ $kind = eagle2 ] && [ "${TRAIN_FROM:-}" ] && more=(--init-from "$TRAIN_FROM")
        [ $kind = eagle3 ] && more+=(--objective eagle3)
        if [ "$TARGET" = $SMALL/small-target ]; then  # of 2,048 tokens and 4 layers
            more+=(--draft-vocab-size 64)
            [ $kind = eagle3 ] && more+=(--layers 0 1 3)
        fi
        take "train-$kind" "$PYTHON" -m train.train_draft_head small --target "$TARGET" --data "$OUT/own" \
            --output "$OUT/$kind" --decode-prompts 4 "${STEPS[@]}" "${more[@]}"
    done
}

parts=("$@")
[ ${#parts[@]} = 0 ] && parts=(table sampled rows head tests identity forwards long chain stock pair model train)
for part in "${parts[@]}"; do
    declare -F "part_$part" >/dev/null || { echo "there is no part $part"; exit 2; }
done
for part in "${parts[@]}"; do "part_$part"; done
[ ${#failed[@]} = 0 ] && echo "all ran" && exit 0
echo "failed, or out of time: ${failed[*]}"; exit 1
