package pgtest

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// closeBudget is how long a pool may take to close.
const closeBudget = 15 * time.Second

// closePool waits until the pool's connections are closed. Close waits for good for one that was
// never released, which would hang the run instead of naming the test.
func closePool(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		pool.Close()
	}()
	late := time.NewTimer(closeBudget)
	defer late.Stop()
	select {
	case <-closed:
	case <-late.C:
		t.Errorf("pool has %d connections that were not released", pool.Stat().AcquiredConns())
	}
}
