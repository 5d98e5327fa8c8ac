"""What a configuration will need on a slice of TPUs, found out without one: memory from XLA's own compiler, time from a
roofline of the traced program."""
