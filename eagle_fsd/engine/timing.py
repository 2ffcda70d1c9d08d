def known_latency(*a): raise NotImplementedError
def use_fastest_attention(*a): raise NotImplementedError
