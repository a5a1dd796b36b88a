"""What makes runs faster: imported by the driver where it is asked for, never by the other root modules."""
