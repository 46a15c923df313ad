import static java.nio.charset.StandardCharsets.UTF_8;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** Uses a front with the official Java client, after the program of the page; each line of the output is a fact. */
public class FrontCases {
    static final ClientServiceProvider CLIENT = Shop.CLIENT;
    static final Duration MINUTE = Duration.ofMinutes(1);
    static ClientConfiguration configuration;

    public static void main(String[] arguments) throws Exception {
        Shop.main(arguments);
        configuration = ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build();
        Set<String> asked = new HashSet<>();
        try (var producer = CLIENT.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics("orders", "steps", "later", "paid")
                .setTransactionChecker(message -> answer(message, asked))
                .build()) {
            send(producer);
            choose(producer);
            giveBack(producer);
            end(producer);
            receive();
        }
        push();
        System.exit(0);
    }

    /** Returns the answer to a question about a transaction, by its body: UNKNOWN at first. */
    static TransactionResolution answer(MessageView message, Set<String> asked) {
        if (asked.add(body(message))) {
            return TransactionResolution.UNKNOWN;
        }
        return body(message).equals("forgotten") ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
    }

    static void send(Producer producer) throws Exception {
        for (var body : List.of("first", "second")) {
            var receipt = producer.send(CLIENT.newMessageBuilder()
                    .setTopic("steps").setBody(body.getBytes(UTF_8)).setMessageGroup("group").setTag("tag")
                    .setKeys("key-1", "key-2").addProperty("name", "value").build());
            say("sent", body, receipt.getMessageId().getVersion());
        }
        refused(() -> producer.send(later(Duration.ofHours(25))));
    }

    static Message later(Duration delay) {
        var due = System.currentTimeMillis() + delay.toMillis();
        return CLIENT.newMessageBuilder()
                .setTopic("later").setBody("late".getBytes(UTF_8)).setDeliveryTimestamp(due).build();
    }

    /** Sends without waiting, and receives what a tag or a condition chooses. */
    static void choose(Producer producer) throws Exception {
        for (var tag : List.of("a", "b", "c")) {
            producer.sendAsync(CLIENT.newMessageBuilder()
                    .setTopic("orders").setBody(tag.getBytes(UTF_8)).setTag(tag)
                    .addProperty("size", "" + (int) tag.charAt(0)).build()).get();
        }
        var byTag = new FilterExpression("a || c");
        var bySize = new FilterExpression("size > 97 AND TAGS <> 'c'", FilterExpressionType.SQL92);
        for (var chosen : List.of(byTag, bySize)) {
            try (var consumer = consumer("choosing-" + chosen.getFilterExpressionType(), "orders", chosen)) {
                var bodies = new TreeSet<String>();
                for (var message : consumer.receive(32, MINUTE)) {
                    bodies.add(body(message));
                    consumer.ack(message);
                }
                say("chosen", chosen.getExpression(), bodies);
            }
        }
    }

    /** Receives a delayed message, gives it back, and acknowledges it by the old handle and by the new one. */
    static void giveBack(Producer producer) throws Exception {
        producer.send(later(Duration.ofSeconds(1)));
        try (var consumer = consumer("giving-back", "later", FilterExpression.SUB_ALL)) {
            var first = some(consumer).get(0);
            consumer.changeInvisibleDuration(first, Duration.ZERO);
            var second = some(consumer).get(0);
            refused(() -> consumer.ack(first));
            consumer.ack(second);
            say("given back", body(second), first.getDeliveryAttempt(), second.getDeliveryAttempt());
        }
    }

    static SimpleConsumer consumer(String group, String topic, FilterExpression chosen) throws ClientException {
        return CLIENT.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup(group)
                .setAwaitDuration(Duration.ofSeconds(5))
                .setSubscriptionExpressions(Map.of(topic, chosen))
                .build();
    }

    /** Receives until there is something. */
    static List<MessageView> some(SimpleConsumer consumer) throws ClientException {
        List<MessageView> found = List.of();
        while (found.isEmpty()) {
            found = consumer.receive(32, MINUTE);
        }
        return found;
    }

    static void end(Producer producer) throws Exception {
        for (var body : List.of("committed", "rolled back", "forgotten", "undone")) {
            var transaction = producer.beginTransaction();
            producer.send(Shop.message("paid", body), transaction);
            if (body.equals("committed")) {
                transaction.commit();
                transaction.commit();
                refused(transaction::rollback);
            } else if (body.equals("rolled back")) {
                transaction.rollback();
            }
        }
    }

    /** Receives with a simple consumer until the answer of the checker has been delivered, too. */
    static void receive() throws Exception {
        try (var consumer = consumer("accounts", "paid", FilterExpression.SUB_ALL)) {
            List<MessageView> all = new ArrayList<>();
            while (all.stream().noneMatch(each -> body(each).equals("forgotten"))) {
                all.addAll(some(consumer));
            }
            for (var message : all) {
                consumer.ack(message);
                var times = message.getProperties().getOrDefault("TRANSACTION_CHECK_TIMES", "not asked");
                say("received", body(message), times);
            }
        }
    }

    /** Receives with a push consumer, which fails once. */
    static void push() throws Exception {
        var all = new CountDownLatch(3);
        try (var consumer = CLIENT.newPushConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup("billing")
                .setSubscriptionExpressions(Map.of("steps", FilterExpression.SUB_ALL))
                .setMessageListener(message -> {
                    say("pushed", body(message), message.getDeliveryAttempt(), message.getTag().get(),
                            new TreeSet<>(message.getKeys()), message.getMessageGroup().get(),
                            message.getProperties().get("name"));
                    all.countDown();
                    boolean fails = body(message).equals("second") && message.getDeliveryAttempt() == 1;
                    return fails ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
                })
                .build()) {
            all.await();
        }
    }

    /** Does what is to be refused, and says in which words of RocketMQ. */
    static void refused(Call call) throws Exception {
        try {
            call.make();
        } catch (ClientException refusal) {
            say("refused", refusal.getMessage().replaceAll("request-id=[^,]*, |(?<=[a-z]) \\[.*", ""));
        }
    }

    interface Call {
        void make() throws Exception;
    }

    static String body(MessageView message) {
        return UTF_8.decode(message.getBody()).toString();
    }

    static synchronized void say(Object... facts) {
        System.out.println(List.of(facts));
    }
}
