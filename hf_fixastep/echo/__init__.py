"""Heart2Heart: echocardiograms of three hospitals, from their files to a report."""
