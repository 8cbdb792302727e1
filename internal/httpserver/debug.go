package httpserver

import (
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
)

// NewDebug returns the handler for operators of the process: metrics and profiles. Profiles contain memory and
// cost CPU time: it belongs on a loopback address, behind LocalNames. The command line, which may hold a password, is
// never served.
func NewDebug(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", http.NotFound)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// NewMetrics returns metrics alone, which may be read from beyond this machine.
func NewMetrics(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	return mux
}

// LocalNames refuses requests that do not name localhost or an address as their host, so that no page in a browser on
// this machine can read the answers under a name of its own (DNS rebinding).
func LocalNames(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
		if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err != nil && host != "localhost" {
			http.Error(w, "the host must be localhost or an address", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
