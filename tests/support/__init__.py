"""What the tests are run with: whole servers under load and faults, random workloads, and writers of files."""
