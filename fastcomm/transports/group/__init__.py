"""Any torch.distributed group as a communicator, and shared memory inside its hosts."""
