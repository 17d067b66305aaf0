"""What comes out of a run: an artefact that can be handed on. Reads run folders, trains nothing."""
