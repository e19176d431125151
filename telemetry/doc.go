// Package telemetry shows how far the consumers of an event log are, to whoever scrapes this process.
//
// [RegisterGauges] reads the log's tables and nothing of the consumers' processes: any process can export the
// gauges, also one that runs no consumer, and a consumer whose process is gone shows a lag that grows. What is not
// known is left out, and never reported as zero: alert on series that are absent, and on failed reads.
//
// All instruments of the library are listed in docs/telemetry.md.
package telemetry
