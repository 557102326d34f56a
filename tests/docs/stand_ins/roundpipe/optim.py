"""A stand-in for RoundPipe's optimizer, on a machine without a compiler."""


class Adam:
    def __init__(self, params, *, lr, weight_decay, decoupled_weight_decay):
        raise RuntimeError("Ninja is required to load C++ extensions")
