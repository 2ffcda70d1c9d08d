"""The model `eagle_fsd` of lm-evaluation-harness.

    python -m eagle_fsd.lm_eval --model eagle_fsd --model_args target=T,draft=D,acceptance=fsd,threshold=0.2 \\
        --tasks gsm8k

takes the arguments of `lm_eval`. The harness is imported by `.model` and not here.
"""
