"""Draft heads for other programs: the layouts of their files, what each would read wrongly, GGUF for llama.cpp."""
