package subscriber_test

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// tracer tells of each statement before it is sent, those of a batch included, and may keep one back.
type tracer struct {
	query  func(sql string)
	refuse func(sql string) bool
}

func (tr *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if tr.query != nil {
		tr.query(data.SQL)
	}
	if tr.refuse != nil && tr.refuse(data.SQL) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		return ctx
	}
	return ctx
}

func (tr *tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (tr *tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		if tr.query != nil {
			tr.query(q.SQL)
		}
	}
	return ctx
}

func (tr *tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (tr *tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
