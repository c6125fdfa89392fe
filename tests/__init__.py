"""The tests. A package, so that worker processes can import a test module's functions by name."""
