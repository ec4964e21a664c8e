"""The public names of DeepSpeed, mapped onto ours."""
