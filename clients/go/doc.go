// Package tollgate is the Go client of tollgate, the quota service.
package tollgate
