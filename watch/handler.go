package watch

import (
	"encoding/json"
	"net/http"
)

// Handler serves the report of a fresh look as JSON, to GET and HEAD, never to be cached: 200 where the status is ok or
// warning, 503 where it is critical or unknown. Each request is one statement, bounded by [Config].Timeout.
//
// It is for monitoring, and, where you really want traffic to depend on the log's consumers, for readiness. It is not
// for liveness: a process that is merely behind is not mended by a restart, and all replicas would be restarted at
// once. A process's liveness is whether its consumers still run: let it exit non-zero on what subscriber.Runner.Failed
// tells, and probe nothing else.
func Handler(w *Watch) http.Handler {
	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		header := response.Header()
		header.Set("Cache-Control", "no-store")
		if request.Method != http.MethodGet && request.Method != http.MethodHead {
			header.Set("Allow", "GET, HEAD")
			http.Error(response, "use GET or HEAD", http.StatusMethodNotAllowed)
			return
		}
		report := w.Look(request.Context())
		body, err := json.MarshalIndent(report, "", "  ")
		if err != nil {
			http.Error(response, "the report cannot be written as JSON", http.StatusInternalServerError)
			return
		}
		header.Set("Content-Type", "application/json")
		code := http.StatusOK
		if report.Status >= Critical {
			code = http.StatusServiceUnavailable
		}
		response.WriteHeader(code)
		if request.Method == http.MethodGet {
			_, _ = response.Write(append(body, '\n')) // who does not read it does not need it
		}
	})
}
