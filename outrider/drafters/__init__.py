"""Things that guess next tokens. They see the Model socket and Drafts, never the target or each other."""
