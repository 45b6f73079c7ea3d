"""The laboratory: experiments of the paper on torch DDP, repeated."""
