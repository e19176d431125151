package retention

// SetScanLimit makes smaller partitions large ones.
func (r *Retention) SetScanLimit(bytes int64) { r.scanLimit = bytes }
