"""The cost model of documents on ranks: its fit, its correction while training, and the worth of host memory."""
