"""`hf-longctx kernels`."""


def kernels() -> None:
    """Show which attention kernel each feature uses on this machine, and why.

    Example: hf-longctx kernels
    """
    from hf_longctx.attention.kernels.report import kernel_report

    print(kernel_report())
