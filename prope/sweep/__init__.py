"""Many runs that differ in a few config fields: planned, run, compared, shown."""
