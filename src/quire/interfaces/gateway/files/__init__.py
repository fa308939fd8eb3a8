"""/v1/files: what clients upload for batches, and what batches bring. Bytes lie on disk, what is known of them in the
storage."""
