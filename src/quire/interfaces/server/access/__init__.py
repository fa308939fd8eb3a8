"""Who asks, and the requests that are being answered. Keys, tenants and quotas are the gateway's."""
