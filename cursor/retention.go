package cursor

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
)

const sqlRetention = `select extract(epoch from r.keep)::float8 from public.event_retention r where r.switched_on`

// Retention is how long a log keeps its events at least, by what is stored with it. It is zero where nothing is removed.
func Retention(ctx context.Context, db Querier, log *Log) (time.Duration, error) {
	rows, _ := db.Query(ctx, log.Render(sqlRetention))
	keeps, err := pgx.CollectRows(rows, pgx.RowTo[float64])
	switch {
	case err != nil:
		return 0, fmt.Errorf("read retention: %w", log.Explain(err))
	case len(keeps) == 0:
		return 0, nil
	case keeps[0] > time.Duration(math.MaxInt64).Seconds():
		return math.MaxInt64, nil
	}
	return seconds(keeps[0]), nil
}
