"""Who may come in, and when: keys, tenants, limits, queues, and the requests that are being answered."""
