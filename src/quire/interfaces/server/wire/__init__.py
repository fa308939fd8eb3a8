"""What goes over the wire, whatever it says: bodies read and checked, answers and events written, errors as objects."""
