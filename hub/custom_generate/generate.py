"""A `custom_generate` method for transformers: EAGLE-2 draft trees with fuzzy acceptance, by the package eagle_fsd."""

from eagle_fsd.hf import hub_generate


def generate(inputs=None, *, model, **arguments):
    """Decode with drafts; `README.md` lists the arguments. `model` is a keyword: transformers binds it."""
    return hub_generate(model, inputs, **arguments)
