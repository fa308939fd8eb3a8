"""Ships with the package: fakes, tiny checkpoints and contract suites, for our tests and for those of extensions."""
