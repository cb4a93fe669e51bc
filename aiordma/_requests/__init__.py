"""Work requests, the in-flight table, the drain, credits, and pools of registered memory."""
