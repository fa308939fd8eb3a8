"""One file a part of the API. What a file enters with @check is run; its name is the group."""
