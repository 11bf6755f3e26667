"""For tests of other projects: conformance suites, planted faults, expectations."""
