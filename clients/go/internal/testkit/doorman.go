package testkit

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
)

// Doorman is a server of Doorman's protocol that the test leads: it is the master, or names another
// one; clients get all that they want.
type Doorman struct {
	Address string

	mu sync.Mutex
	// Another master, if it is not nil.
	master   *string
	isBroken bool
	asked    [][]string
	released []string
}

// StartDoorman starts a Doorman.
func StartDoorman(t testing.TB) *Doorman {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &Doorman{Address: listener.Addr().String()}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "doorman.Capacity",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{
			{MethodName: "GetCapacity", Handler: handler(d.getCapacity)},
			{MethodName: "ReleaseCapacity", Handler: handler(d.releaseCapacity)},
		},
	}, d)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return d
}

// handler decodes the request of a method.
func handler[Q any, A any](answer func(*Q) (*A, error)) grpc.MethodHandler {
	return func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		request := new(Q)
		if err := decode(request); err != nil {
			return nil, err
		}
		return answer(request)
	}
}

// BeMaster makes it the master.
func (d *Doorman) BeMaster() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.master = nil
}

// NameMaster has it name another master; none with an empty address.
func (d *Doorman) NameMaster(address string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.master = &address
}

// Break has it carry out requests for leases, and answer them with an error.
func (d *Doorman) Break() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.isBroken = true
}

// Asked is the names of the resources of each request for leases.
func (d *Doorman) Asked() [][]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.asked)
}

// Released is the names of what was released.
func (d *Doorman) Released() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.released)
}

func (d *Doorman) mastership() *doorman.Mastership {
	if d.master == nil {
		return nil
	}
	address := *d.master
	return &doorman.Mastership{MasterAddress: &address}
}

func (d *Doorman) getCapacity(request *doorman.GetCapacityRequest) (*doorman.GetCapacityResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var names []string
	for _, asked := range request.Resource {
		names = append(names, asked.GetResourceId())
	}
	d.asked = append(d.asked, names)
	if d.isBroken {
		return nil, status.Error(codes.Internal, "broken")
	}
	response := &doorman.GetCapacityResponse{Mastership: d.mastership()}
	if response.Mastership != nil {
		return response, nil
	}
	for _, asked := range request.Resource {
		id, wants := asked.GetResourceId(), asked.GetWants()
		expiry, interval := time.Now().Unix()+60, int64(1)
		response.Response = append(response.Response, &doorman.ResourceResponse{
			ResourceId: &id,
			Gets:       &doorman.Lease{ExpiryTime: &expiry, RefreshInterval: &interval, Capacity: &wants},
		})
	}
	return response, nil
}

func (d *Doorman) releaseCapacity(request *doorman.ReleaseCapacityRequest) (*doorman.ReleaseCapacityResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	response := &doorman.ReleaseCapacityResponse{Mastership: d.mastership()}
	if response.Mastership == nil {
		d.released = append(d.released, request.ResourceId...)
	}
	return response, nil
}
