def raw(*a): raise NotImplementedError
def filesystem(*a): raise NotImplementedError
