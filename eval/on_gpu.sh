#!/bin/bash
# What a first hour on a GPU has to show, part by part.
#   bash eval/on_gpu.sh OUT [tests] [identity] [step] [model] [train]     # all where none is named
#   TOY=1 DEVICE=cpu bash eval/on_gpu.sh OUT                              # the same commands, small
# A command has LIMIT seconds (540). One that fails or runs out of them is told at the end; the others still run.
# TARGET, DRAFT: a pair; without them the bundled small one. QUESTIONS: MT-Bench's file. PYTHON: the interpreter.
# EAGER=1: nothing compiled, no graphs. TRAIN_FROM: a head to go on with for EAGLE-2.
# Paths but OUT are from the root of the checkout.
set -uo pipefail
OUT=$(mkdir -p "${1:?a folder for the results}" && cd "$1" && pwd); shift
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}; LIMIT=${LIMIT:-540}; DEVICE=${DEVICE:-cuda}; TOY=${TOY:-}
TARGET=${TARGET:-checkpoints/small-target}; DRAFT=${DRAFT:-checkpoints/small-draft}
PAIR=(--target "$TARGET" --draft "$DRAFT" --device "$DEVICE")
export PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
if [ -z "${QUESTIONS:-}" ]; then
    QUESTIONS=$OUT/questions.jsonl
    for word in red blue green; do
        echo "{\"question_id\": \"$word\", \"category\": \"writing\", \"turns\": [\"Say $word.\", \"Again.\"]}"
    done >"$QUESTIONS"
fi
PROMPTS=16 EACH=3 TOKENS=128 SHAPE=(--shape llama-3.1-8b --nodes 16 32 60 --kernels 25)
[ "$TOY" ] && PROMPTS=2 EACH=1 TOKENS=8 SHAPE=(--shape tiny --nodes 8 --tree 8,4,2 --context 16 --rounds 2 --kernels 25)
COMPILE=("" --compile); [ "${EAGER:-}" ] && COMPILE=("")
failed=()

take() {  # NAME COMMAND...: its output in OUT/NAME.log and here
    echo "== $1: ${*:2}"
    timeout -k 10 "$LIMIT" "${@:2}" 2>&1 | tee "$OUT/$1.log" || failed+=("$1")
}

part_tests() { take tests "$PYTHON" -m pytest -q -m cuda -p no:cacheprovider $(grep -l "mark\.cuda" tests/test_*.py); }

part_identity() {  # greedy texts against model.generate, on prompts of the generator; flash-attn is taken by `split`
    local kind
    for kind in "float32 eager" "float32 sdpa" "float32 sdpa --compile" "float32 split" "bfloat16 sdpa" \
                "bfloat16 sdpa --compile" "bfloat16 split" "bfloat16 split --compile"; do
        set -- $kind
        take "identity-$1-$2${3:-}" "$PYTHON" -m eval.lossless_check "${PAIR[@]}" --dtype "$1" \
            --attn-implementation "$2" ${3:-} --prompts $PROMPTS --samples 0 --max-new-tokens 64 \
            --out "$OUT/identity-$1-$2${3:-}.json"
    done
}

part_step() {  # random weights of an 8B shape: each part beside the floor of streaming the weights, and its operations
    local compile
    for compile in "${COMPILE[@]}"; do
        take "step$compile" "$PYTHON" -m eval.step "${SHAPE[@]}" --device "$DEVICE" $compile \
            --out "$OUT/step$compile.json"
    done
}

part_model() {
    local compile
    for compile in "${COMPILE[@]}"; do
        take "model$compile" "$PYTHON" -m eval.benchmark "${PAIR[@]}" $compile --questions "$QUESTIONS" --warm-up 1 \
            --per-category $EACH --max-new-tokens $TOKENS --fsd 0.3 0.5 --profile 1 --out "$OUT/model$compile"
    done
}

part_train() {  # answers of its own, then an EAGLE-2 and an EAGLE-3 head on them; accelerate picks the device
    local kind more asked=(--self-prompted 1000 --batch 256 --max-length 1024 --max-new-tokens 256)
    if [ "$TOY" ]; then
        "$PYTHON" -m train.tasks --count 12 --out "$OUT/tasks.json" || failed+=(tasks)
        asked=(--data "$OUT/tasks.json" --max-length 256)
    fi
    take prepare "$PYTHON" -m train.prepare_data --target "$TARGET" "${asked[@]}" --out "$OUT/own"
    for kind in eagle2 eagle3; do
        more=(head.kind=$kind)
        [ $kind = eagle2 ] && [ "${TRAIN_FROM:-}" ] && more=(head={} "init_from=$TRAIN_FROM")
        [ $kind = eagle3 ] && more+=(objective=eagle3)
        if [ "$TARGET" = checkpoints/small-target ]; then  # of 2,048 tokens and 4 layers
            more+=(head.draft_vocab_size=64)
            [ $kind = eagle3 ] && more+=("head.eagle_aux_hidden_state_layer_ids=[0,1,3]")
        fi
        if [ "$TOY" ]; then more+=(steps=2 batch_tokens=512 eval_documents=2 eval_every=2)
        else more+=(steps=400 batch_tokens=16384 eval_every=200); fi
        take "train-$kind" "$PYTHON" train/train_draft_head.py --config train/configs/small.yaml target="$TARGET" \
            data="$OUT/own" output="$OUT/$kind" tracker=none decode_prompts=4 "${more[@]}"
    done
}

parts=("$@"); [ ${#parts[@]} = 0 ] && parts=(tests identity step model train)
for part in "${parts[@]}"; do
    declare -F "part_$part" >/dev/null || { echo "there is no part $part"; exit 2; }
done
for part in "${parts[@]}"; do "part_$part"; done
[ ${#failed[@]} = 0 ] && echo "all ran" && exit 0
echo "failed, or out of time: ${failed[*]}"; exit 1
