"""Names of other libraries, mapped onto ours."""
