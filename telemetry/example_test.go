package telemetry_test

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
	"github.com/watermill-eventlog/watermill-eventlog/telemetry"
)

func ExampleRegisterGauges() {
	var pool *pgxpool.Pool // of a role that may SELECT
	unregister, err := telemetry.RegisterGauges(telemetry.GaugesConfig{
		DB: pool, Keys: []cursor.Key{{Consumer: "billing", Topic: "orders"}},
	})
	if err != nil {
		panic(err)
	}
	defer unregister()
}
