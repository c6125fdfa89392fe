"""A GPU that is not there: fake tensors that say they are on cuda, forward and backward, on any torch.

    hooks.cpp      what torch lacks without a GPU: that CUDA exists, and which stream is current
    library.py     compiles it for the torch at hand, and loads it before torch is imported
    torch_cuda.py  torch.cuda's functions for one H100
    clocks.py      streams and events, as vector clocks
    watch.py       every operation: copies between host and device that wait, tensors of the wrong device
    races.py       every access to memory: races between streams, memory that is freed too early
    places.py      which line asked
    cases.py       which steps are run
    steps.py       planned steps at real widths, in which nothing has values
    __main__.py    python -m tests.worlds.fake_cuda NAME ...     prints as JSON what was seen

Everything belongs to the whole process, so that a test runs it as a program (tests/training/test_fake_cuda.py). Tensors have
shapes, types and devices and no values: who asks for a value fails, and so does an operation on tensors of two devices.
"""
